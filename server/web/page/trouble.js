// Errors of the server, for people.

/** The message of a response that is no success. The server sends JSON; a proxy may send something else. */
export async function troubleOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}
