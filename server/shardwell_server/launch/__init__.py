"""Workers of any program as local processes: started together, watched, and ended together."""
