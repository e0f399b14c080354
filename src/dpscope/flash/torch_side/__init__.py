"""What the engine needs to know of torch's own machinery."""
