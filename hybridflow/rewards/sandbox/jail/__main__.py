"""python -I -S jail LIFELINE < request: runs one program, prints the verdict as JSON."""

from __future__ import annotations

import json
import os
import sys

# Isolated mode adds this folder only, and the modules are a package.
sys.path.append(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from jail.supervise import supervise  # noqa: E402

if __name__ == "__main__":
    sys.stdout.write(json.dumps(supervise(json.load(sys.stdin.buffer), lifeline=int(sys.argv[1]))))
