"""What a user runs before a long job: what is installed, what the chip can do, are packing and FP8 safe here."""
