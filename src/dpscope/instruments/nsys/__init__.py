"""Nsight Systems: what the GPU and the host did at each moment of a few steps, as a timeline and its summary.

`finding` looks for nsys and what its version can do, `command` builds command lines and the environment they run in,
`running` takes a capture, `reading` opens its SQLite export, `summary` makes figures of it, `stripping` removes what
says where it was taken, `failures` turns nsys's messages into remedies.
"""
