#!/usr/bin/python3
"""A call of XAPI's storage interface (SMAPIv3): the name by which this file is called says which, and the folder of its
folder whether it is one of `datapath` or of `volume`.

`ferrite` reads the parameters from standard input and prints the result. This file is Python because XAPI runs it by
`python3 -m observer` while it traces.
"""
import os
import sys

# Its own name is a link, which says more than the file that it leads to.
folder, call = os.path.split(os.path.abspath(sys.argv[0]))
kind = os.path.basename(os.path.dirname(folder))
command = ["ferrite", "compat", "smapi-" + kind, call] + sys.argv[1:]
# `subprocess` and `json` would take half of the time of a call.
status = os.spawnvp(os.P_WAIT, command[0], command)
# That of a child that could not run it. It has no such status of its own.
if status == 127:
    import json

    why = "cannot run ferrite: PATH has no such program that may be executed; install it, in a folder of PATH"
    backtrace = {"error": why, "files": [], "lines": []}
    print(json.dumps({"code": "SR_BACKEND_FAILURE", "params": ["Ferrite_error", why], "backtrace": backtrace}))
    status = 1
sys.exit(status)
