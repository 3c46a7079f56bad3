"""`measure core`: step time, memory and final models of algorithms."""
