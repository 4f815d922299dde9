"""`megaopt galore`: a step's errors beside torch's own (test), and its times (bench)."""
