"""torch.compile around a private model, or inside it: taps that compiled graphs hold whole (docs/compiled.md)."""
