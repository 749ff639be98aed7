"""What ranks compare of their loaders before they train."""
