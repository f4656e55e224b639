"""Kill the real daemon at every stage of its life, again and again, and look for anything lost.

    python -m tests.crash --rounds 200

`model` says what a session must look like after its events, `agents` send them and note what
was acknowledged, `lmcache` is the store that the daemon evicts from and that remembers it,
`stored` reads the database of a dead daemon, `checks` compares all that, `old_database` makes
what the Rust daemon leaves, and `campaign` kills.
"""
