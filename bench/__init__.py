"""What the project measures of itself: `steps` compares training steps; results/ and history/ have the result files."""
