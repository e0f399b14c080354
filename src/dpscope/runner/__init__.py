"""One child process for each run spec; its result or failure becomes a result file."""
