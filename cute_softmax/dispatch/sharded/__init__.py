"""Rows that several ranks share: each reads its slice once, and one collective merges numbers of rows."""
