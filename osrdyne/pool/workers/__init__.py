"""The worker groups loop: starts, restarts, scales, watches and stops workers."""
