"""What must hold before any test imports Ray."""

import os

# The applications' Ray asks for a token, and Ray reads this when it is imported.
os.environ.setdefault("RAY_AUTH_MODE", "token")
