"""The real daemon for minutes, with sessions and chunks that are new all the time.

    python -m tests.churn --minutes 10

`clients` open, turn, fork, suspend, close and abandon sessions; `samples` looks at the daemon
from outside and judges whether anything grows; `__main__` runs both and prints the table.
"""
