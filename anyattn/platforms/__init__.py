"""What machine this is: facts, never opinions. One file a vendor; no file here knows an attention backend."""
