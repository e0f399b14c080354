"""Nsight Compute: which bytes a step moves, counted by the GPU itself.

`metrics` names what is counted, `command` builds the command line, `running` runs it, `reading` reads the report it
leaves, `kernels` says which kernels moved the bytes, `failures` turns ncu's messages into remedies.
"""
