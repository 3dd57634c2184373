# fork: extend
class ModelArchConfigConvertorBase:
    # fork: edit 80d5127c1e11
    def _normalize_quantization_config(
        self, quant_cfg: dict, quant_algo_upper: str, upstream
    ):
        # config.json names the method itself; hf_quant_config.json alone does not.
        # fork: instead-of raise
        if quant_algo_upper != "MIXED_PRECISION":
            raise upstream
        quant_cfg["quant_method"] = "modelopt_mixed"
