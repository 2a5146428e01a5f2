"""The machine file: what a device, its links and its host can do, as `train-cli calibrate` measures it. No torch in here."""
