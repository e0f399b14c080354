"""The first lines of an executable Python script, for an interpreter anywhere: `#!` ends a path at its first space."""

FIRST_LINES = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
"""
