# SPDX-License-Identifier: Apache-2.0
from tests.kernels.cuda_emulator import device  # noqa: F401
from tests.one_rank import one_rank  # noqa: F401
