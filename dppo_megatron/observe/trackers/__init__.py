"""W&B, TensorBoard, MLflow and trackio behind one sink. Each tool runs in a separate process."""
