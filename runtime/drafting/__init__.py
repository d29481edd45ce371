"""What runs the drafters, and the context that they still have to inject."""
