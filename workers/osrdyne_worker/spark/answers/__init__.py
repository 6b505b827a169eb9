"""The rows of a DataFrame as an answer: collected, or as Arrow record batches in bounded memory."""
