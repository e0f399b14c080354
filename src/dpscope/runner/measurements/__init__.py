"""One file an instrument: from a run spec to a result, in this very process."""
