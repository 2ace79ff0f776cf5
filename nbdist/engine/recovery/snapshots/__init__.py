"""What a rank holds of a step, for itself and for another rank."""
