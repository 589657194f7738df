# shellcheck shell=bash
# Sourced by the launchers beside it: turns environment variables into overrides and runs `verl-opd`
# with them.
#
#   DRY_RUN=1      print resolved configuration, environment and placement, and stop
#   PYTHON=...     interpreter that has verl-opd (default: .venv of this checkout, else python3)

# variable -> key; without the variable (unset or empty) the recipe's value stays
launch_keys=(
    MODEL_PATH=target.path
    DRAFT_PATH=draft.path
    DRAFT_BLOCK_SIZE=draft.block_size
    TRAIN_FILES=data.train_files
    VAL_FILES=data.val_files
    TRAIN_PROMPT_BSZ=data.train_batch_size
    MAX_PROMPT=data.max_prompt_length
    MAX_RESPONSE_LENGTH=data.max_response_length
    NUM_SPECULATIVE_TOKENS=rollout.num_speculative_tokens
    MAX_NUM_SEQS=rollout.max_num_seqs
    GPU_MEMORY_UTILIZATION=rollout.gpu_memory_utilization
    ROLLOUT_ENFORCE_EAGER=rollout.enforce_eager
    ROLLOUT_TEMPERATURE=rollout.temperature
    DFLASH_MAX_RESPONSE_ANCHORS=opd.max_response_anchors
    DFLASH_RESPONSE_ANCHOR_STRIDE=opd.response_anchor_stride
    DFLASH_ATTENTION_IMPL=compute.attention
    GRADIENT_CHECKPOINTING=compute.gradient_checkpointing
    LM_HEAD_CHUNK_SIZE=compute.lm_head_chunk_size
    LR=optim.lr
    SFT_FILES=sft.files
    SFT_LR=sft.lr
    TEACHER_WORLD_SIZE=teacher.replicas
    STUDENT_WORLD_SIZE=trainer.n_student_workers
    NNODES=trainer.nnodes
    UPDATE_ACCUMULATION_STEPS=trainer.update_accumulation_steps
    TOTAL_EPOCHS=trainer.total_epochs
    TOTAL_STEPS=trainer.total_training_steps
    TEST_FREQ=trainer.test_freq
    SAVE_FREQ=trainer.save_freq
    RUN_DIR=trainer.run_dir
    PROJECT_NAME=trainer.project_name
    EXPERIMENT_NAME=trainer.experiment_name
)

# Lists of files are separated by commas, as on a command line: a.jsonl,b.jsonl
launch_value() {
    case $1 in
        data.train_files | sft.files) printf '[%s]' "$2" ;;
        rollout.enforce_eager | compute.gradient_checkpointing) printf '%s' "${2,,}" ;;
        *) printf '%s' "$2" ;;
    esac
}

launch_overrides() {
    local entry name key
    overrides=()
    for entry in "${launch_keys[@]}"; do
        name=${entry%%=*} key=${entry#*=}
        [[ -n ${!name:-} ]] && overrides+=("$key=$(launch_value "$key" "${!name}")")
    done
    # JSON for the engine, quoted as one string for Hydra
    local graphs=${VLLM_COMPILATION_CONFIG:-}
    [[ -n $graphs ]] && overrides+=("rollout.engine_kwargs.compilation_config='$graphs'")
    return 0
}

# launch RECIPE [key=value ...]: overrides given here come last and win.
launch() {
    local recipe=$1 here overrides python=${PYTHON:-}
    shift
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    [[ -z $python && -x $here/.venv/bin/python ]] && python=$here/.venv/bin/python
    launch_overrides
    local command=("${python:-python3}" -m verl_opd.cli)
    if [[ ${DRY_RUN:-0} == 1 ]]; then
        exec "${command[@]}" plan "$recipe" "${overrides[@]}" "$@"
    fi
    exec "${command[@]}" train "$recipe" "${overrides[@]}" "$@"
}
