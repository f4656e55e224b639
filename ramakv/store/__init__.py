"""SQLite: the file, its rows, and what the journal does to them."""
