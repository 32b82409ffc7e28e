"""What posx asks of the machine: a right compiler, programs kept on disk, its devices, the speed it could reach."""
