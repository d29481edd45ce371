"""The drafters' side of a step: the context that they still have to inject."""
