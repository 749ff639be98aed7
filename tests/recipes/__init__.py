"""The recipes of docs/recipes run as they are printed."""
