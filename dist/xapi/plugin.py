#!/usr/bin/python3
"""A call of XAPI's storage interface (SMAPIv3): the name by which this file is called says which, and the folder of its
folder whether it is one of `datapath` or of `volume`.

`ferrite` reads the parameters from standard input and prints the result. This file is Python because XAPI runs it by
`python3 -m observer` while it traces.
"""
import json
import os
import subprocess
import sys

# Its own name is a link, which says more than the file that it leads to.
folder, call = os.path.split(os.path.abspath(sys.argv[0]))
kind = os.path.basename(os.path.dirname(folder))
command = ["ferrite", "compat", "smapi-" + kind, call] + sys.argv[1:]
try:
    status = subprocess.call(command)
except OSError as error:
    why = "cannot run ferrite: {}; install it, in a folder of PATH".format(error)
    backtrace = {"error": why, "files": [], "lines": []}
    print(json.dumps({"code": "SR_BACKEND_FAILURE", "params": ["Ferrite_error", why], "backtrace": backtrace}))
    status = 1
sys.exit(status)
