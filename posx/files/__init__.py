"""Files and folders that survive a kill: written whole, appended line by line, held by one process. One place each."""
