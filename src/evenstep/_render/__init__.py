"""Numbers, tables and sentences, the same in every command and in the demo."""
