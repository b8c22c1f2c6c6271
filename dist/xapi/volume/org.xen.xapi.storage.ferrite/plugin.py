#!/usr/bin/python3
"""A call of XAPI's storage interface (SMAPIv3): the name by which this file is called says which.

`ferrite` reads the parameters from standard input and prints the result. This file is Python because XAPI runs it by
`python3 -m observer` while it traces.
"""
import json
import os
import subprocess
import sys

command = ["ferrite", "compat", "smapi-volume", os.path.basename(sys.argv[0])] + sys.argv[1:]
try:
    status = subprocess.call(command)
except OSError as error:
    why = "cannot run ferrite: {}; install it, in a folder of PATH".format(error)
    backtrace = {"error": why, "files": [], "lines": []}
    print(json.dumps({"code": "SR_BACKEND_FAILURE", "params": ["Ferrite_error", why], "backtrace": backtrace}))
    status = 1
sys.exit(status)
