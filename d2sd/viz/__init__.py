"""Pictures of speculation: the tree of a step as SVG, a whole answer as one page. Nothing here needs torch."""
