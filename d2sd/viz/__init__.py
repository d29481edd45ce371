"""Pictures of speculation: the tree of a step as SVG, a complete answer as an HTML page. Does not import torch."""
