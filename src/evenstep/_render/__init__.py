"""Figures, tables and pictures, the same in every command and in the demo."""
