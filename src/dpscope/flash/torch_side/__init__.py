"""Parts of torch's machinery that the engine depends on."""
