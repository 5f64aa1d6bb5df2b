"""What a training step will take, foretold without the device it will run on."""
