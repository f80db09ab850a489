"""How a model and its optimizer are laid out over the ranks."""
