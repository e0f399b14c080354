"""Flash clipping for Opacus users."""
