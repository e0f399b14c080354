"""One child process for each run spec; whatever happens to it becomes a result."""
