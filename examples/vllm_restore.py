"""vllm_restore.py MODEL MOUNT: vLLM computes a prompt the first time; from then on, after any restart, it restores it.

What a user adds to an engine's arguments are the three lines of `kv_transfer_config`. On the command line it is

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "TuttifsConnector",
        "kv_connector_module_path": "tuttifs.vllm", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"path": "MOUNT"}}'
"""

import sys


def kv_transfer_config(mount, **more):
    return {"kv_connector": "TuttifsConnector", "kv_connector_module_path": "tuttifs.vllm", "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"path": mount, **more}}


def main():
    from vllm import LLM, SamplingParams
    model, mount = sys.argv[1:]
    llm = LLM(model, kv_transfer_config=kv_transfer_config(mount))
    prompt = "A filesystem for the KV cache of language models keeps " + "what was computed once, " * 400
    output, = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=32))
    print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens were restored")
    print(output.outputs[0].text)


if __name__ == "__main__":
    main()
