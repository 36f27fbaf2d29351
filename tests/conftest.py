"""What must hold before any test imports Ray."""

import os

# The applications' Ray asks for a token, and Ray reads this when it is imported.
os.environ.setdefault("RAY_AUTH_MODE", "token")
# As `dsde serve` does; otherwise Ray would look for an application's loopback address at this machine's other one.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
