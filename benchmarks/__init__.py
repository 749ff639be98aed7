"""Every figure that the documentation claims, as a command."""
