"""`megaopt muon`: an update's errors beside torch's own (test), and a step's times (bench)."""
