// Reads files that the operator chooses.
export const MAX_BYTES = 900 * 1024;

// Reads rule files. Throws if they are larger than one call may be.
export async function readRuleFiles(list) {
  const files = [...list];
  checkSize(files);
  return Promise.all(files.map(async (file) => ({ name: file.name, text: await file.text() })));
}

export async function readTextFile(file) {
  checkSize([file]);
  return file.text();
}

function checkSize(files) {
  const bytes = files.reduce((total, file) => total + file.size, 0);
  if (bytes > MAX_BYTES) {
    throw new Error(`The files have ${Math.ceil(bytes / 1024).toLocaleString("en-GB")} KB. A call may have at most 900 KB. Use “sluicegate simulate” for more.`);
  }
}
