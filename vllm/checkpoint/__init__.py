# SPDX-License-Identifier: Apache-2.0
"""Tools that read, check and write checkpoints without starting the engine."""
