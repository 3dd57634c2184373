from vllm.checkpoint.preflight import check_before_serving


# fork: extend
class EngineArgs:
    # fork: edit 00ce2b83be40
    def create_engine_config(self):
        # fork: at start
        check_before_serving(self)
