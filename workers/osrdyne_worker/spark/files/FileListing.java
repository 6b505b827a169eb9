import java.io.FileNotFoundException;
import java.io.IOException;
import java.util.ArrayList;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.CommonPathCapabilities;
import org.apache.hadoop.fs.EtagSource;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RemoteIterator;

/**
 * Lists the files and directories below a path of any file system of Hadoop, in slices.
 *
 * Compiled by Janino (see spark/java/janino.py): only Java that Janino supports is used.
 */
public final class FileListing {
    private final Configuration configuration;
    private final Path given;
    private final int maxLevels;
    private FileSystem files;
    /** Whether directories have a time. S3A reports the moment of the listing for them. */
    private boolean directoriesHaveTimes;
    private String root;
    /** Directories that are still to be listed, and their levels. */
    private final ArrayList directories = new ArrayList();
    private final ArrayList levels = new ArrayList();
    private RemoteIterator entries;
    private int level;

    public FileListing(Configuration configuration, String path, int maxLevels) {
        this.configuration = configuration;
        this.given = new Path(path);
        this.maxLevels = maxLevels;
    }

    /**
     * The next entries, one in a line; null after the last one. A line has `d` or `f`, the size, the modification time
     * in milliseconds (0: none), an identity, and the escaped path below the root. The root comes first. Throws
     * FileNotFoundException if it does not exist.
     */
    public String slice(int maxEntries) throws IOException {
        StringBuilder lines = new StringBuilder();
        int count = 0;
        if (files == null) {
            files = given.getFileSystem(configuration);
            // Stores of objects, which have no directories of their own, tag the content of each object.
            directoriesHaveTimes = !files.hasPathCapability(given, CommonPathCapabilities.ETAGS_AVAILABLE);
            FileStatus first = files.getFileStatus(given);
            root = first.getPath().toUri().getRawPath();
            if (first.isDirectory()) {
                directories.add(first.getPath());
                levels.add(Integer.valueOf(0));
            }
            append(lines, first);
            count++;
        }
        while (count < maxEntries) {
            if (entries == null) {
                if (directories.isEmpty()) {
                    return count == 0 ? null : lines.toString();
                }
                int last = directories.size() - 1;
                level = ((Integer) levels.remove(last)).intValue();
                if (level > maxLevels) {
                    throw new IOException("too many levels of directories");
                }
                entries = listed((Path) directories.remove(last));
            } else if (!hasNext()) {
                entries = null;
            } else {
                FileStatus status = (FileStatus) entries.next();
                if (status.isDirectory()) {
                    directories.add(status.getPath());
                    levels.add(Integer.valueOf(level + 1));
                }
                append(lines, status);
                count++;
            }
        }
        return lines.toString();
    }

    /** The entries of a directory; null if it was removed meanwhile, as if it had none. */
    private RemoteIterator listed(Path directory) throws IOException {
        try {
            return files.listStatusIterator(directory);
        } catch (FileNotFoundException removed) {
            return null;
        }
    }

    private boolean hasNext() throws IOException {
        try {
            return entries.hasNext();
        } catch (FileNotFoundException removed) {
            return false;
        }
    }

    private void append(StringBuilder lines, FileStatus status) {
        String path = status.getPath().toUri().getRawPath();
        String below = path.startsWith(root) ? path.substring(root.length()) : path;
        String tag = status instanceof EtagSource ? ((EtagSource) status).getEtag() : null;
        lines.append(status.isDirectory() ? 'd' : 'f').append(' ').append(status.getLen()).append(' ');
        boolean hasTime = !status.isDirectory() || directoriesHaveTimes;
        lines.append(hasTime ? status.getModificationTime() : 0L).append(' ');
        lines.append(tag == null || tag.isEmpty() ? "-" : tag.replace(' ', '_')).append(' ').append(below).append('\n');
    }
}
