"""One file for each instrument: from a run spec to a result, in the current process."""
