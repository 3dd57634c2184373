# SPDX-License-Identifier: Apache-2.0
from typing import Literal

# fork: append
MoEBackend = Literal["situ_sm90",]  # fmt: skip
