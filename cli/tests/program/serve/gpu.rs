//! What is said where there is no GPU to compute on.

use crate::process::terrace;

/// What `terrace serve` says of a device that it cannot use, which is all that it says.
fn refusal(device: &str) -> String {
    let mut command = terrace();
    command.args(["serve", "--listen", "127.0.0.1:0", "--l3", "none", "--device", device]);
    // A machine that has a GPU has none for this.
    command.env("CUDA_VISIBLE_DEVICES", "");
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!(said.trim_end().lines().count(), 1, "{said}");
    assert!(output.stdout.is_empty(), "{:?}", output.stdout);
    said
}

#[test]
#[cfg(feature = "cuda")]
fn a_machine_without_a_gpu_is_told_what_is_missing() {
    for device in ["cuda", "cuda:1"] {
        let said = refusal(device);
        assert!(said.contains("cannot compute on a GPU: "), "{said}");
        let advice = ["install the driver", "install driver version 580", "`nvidia-smi` lists one"];
        assert!(advice.iter().any(|advice| said.contains(advice)), "{said}");
    }
}

#[test]
#[cfg(not(feature = "cuda"))]
fn a_program_without_gpus_says_how_to_build_one_that_has_them() {
    let said = refusal("cuda");
    assert!(said.contains("build it with `--features cuda`, or leave out --device"), "{said}");
}

#[test]
fn what_is_no_device_is_refused_by_its_name() {
    let said = refusal("tpu");
    assert!(said.contains("--device tpu: write it as cpu, cuda or cuda:NUMBER"), "{said}");
}
